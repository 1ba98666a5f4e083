"""The parameter server: tables of rows by key that grow by themselves, and the process that holds a share of them."""
