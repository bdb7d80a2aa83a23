"""The command line: one module per subcommand, imported only when it is used."""
