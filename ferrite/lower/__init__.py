"""From graph nodes to programs: the only place that sees both."""
