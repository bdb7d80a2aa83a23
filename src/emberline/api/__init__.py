"""Parse the JSON of each wire protocol into calls, and write replies from deltas. No I/O."""
