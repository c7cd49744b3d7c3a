"""Blocks in this process: lowering to functions, checks of what is fed, and what their bits depend on."""
