"""Wire JSON to our nouns and back, for every protocol we speak. No I/O."""
