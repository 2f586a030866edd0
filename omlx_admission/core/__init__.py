"""Admission to a pool of models: which request gets which model, when, and what a refusal says.

Everything here stands alone: relative imports only, its own :mod:`.config`, one
:mod:`.port` to the pool, one protocol of :mod:`.events` that is silent by default.

- :mod:`.policy` decides: plain functions of a view of the pool and the time.
- :mod:`.queue` carries decisions out and waits; :mod:`.quiesce` waits for one model.
- :mod:`.request` is the HTTP request behind a call, and :mod:`.refusal` the answer to a
  refused one, in the shape of its route.
- :mod:`.pool` is the port to oMLX's engine pool.
"""
