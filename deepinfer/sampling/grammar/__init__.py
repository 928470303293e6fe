"""Structured output: from a regex, a JSON schema, an EBNF or declared tools to masks over the vocabulary.

Regexes and schemas are translated to EBNF here, so that it is known exactly what a grammar enforces; xgrammar compiles
the EBNF for a vocabulary and matches tokens.
"""
