"""The verbs: command line, launch."""
