"""One KFP step per file: a doorway of a few lines that calls one function of `kftrain.stages`."""
