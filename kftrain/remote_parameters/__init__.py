"""The workers' side of the parameter server: which server holds a key, and the connection to them all."""
