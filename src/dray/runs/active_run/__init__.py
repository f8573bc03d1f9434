"""An active run: its logs, its end on request, commands in its container, and a watch over its attempts."""
