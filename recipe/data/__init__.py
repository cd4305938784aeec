"""Conversations → exact training rows (`prepare`), reading them (`rows`), and their order (`plan`)."""
