"""One file per subcommand, imported lazily."""
