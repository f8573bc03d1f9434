"""A report of one run or several: gathered from their folders, written as one HTML page or as Markdown.

`data` reads the folders, `sections` says what stands in a report, `html`, `svg` and `markdown` write it.
"""
