"""The admission policy in virtual time: a pool of its own, clients, faults, and an optimum.

Nothing here waits or reads a clock. The same world serves the tests (every
contract checked after every event) and the benchmarks (waits and swaps of the
policy beside those of other rules).
"""
