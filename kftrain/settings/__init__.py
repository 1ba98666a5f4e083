"""What every section of the configuration is made of, and how files become one."""
