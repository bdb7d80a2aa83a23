"""Tokenizer, detokenizer, chat templates and hashes of KV blocks. Nothing here needs torch."""
