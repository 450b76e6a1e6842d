"""The pattern matcher: patterns as data, written by hand or traced from a function, found in a graph and replaced.

nodes.py     what a pattern is made of
match.py     whether it stands at a node
check.py     what else is asked of it there
regions.py   what it must not reach across
table.py     many patterns over one graph, by the op they end in
trace.py     a pattern from a function
traced.py    two functions: what to look for, and what to put there
splice.py    a function in place of what was matched
seen.py      what others could see of that, besides its values
lowering.py  a function that makes loops of what was matched
text.py      patterns as text, and back
"""
