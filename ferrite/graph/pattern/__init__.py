"""The pattern matcher: patterns as data, written by hand or traced from a function, found in a graph and replaced.

nodes.py    what a pattern is made of
match.py    whether it stands at a node
table.py    many patterns over one graph, by the op they end in
trace.py    a pattern from a function
splice.py   a function in place of what was matched
text.py     patterns as text, and back
"""
