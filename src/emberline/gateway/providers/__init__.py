"""Providers: where a call goes and how it is asked there; one small file each."""
