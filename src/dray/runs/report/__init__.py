"""A report of one or several runs, from their folders, as one HTML page or as Markdown.

`data` reads the folders, `sections` chooses the content, `html`, `figures` and `markdown` write it.
"""
