"""What happened during a compile, as data and for people. Reads everything, changes nothing."""
