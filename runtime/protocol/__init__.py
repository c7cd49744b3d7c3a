"""Pure state machines: `step(state, event, now) -> effects`. No I/O, no clock, no threads in here."""
