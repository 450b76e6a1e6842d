"""What a compiled graph owes to its user, each promise tried against eager."""
