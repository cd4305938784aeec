"""What all ranks agree on before they start, and ask each other while they run."""
