"""Parking: what a busy model runs is taken out of its engine, and goes on in the next one.

`rows` knows what an engine holds of an answer and runs on the engine's thread, `answers`
knows who waits for it and runs on the event loop, `parking` drives both and wraps oMLX.
"""
