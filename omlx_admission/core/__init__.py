"""Admission to a pool of models: which request gets which model, when, and what a refusal says.

Everything here is independent of the plugin around it: relative imports only, its own
:mod:`.config`, one :mod:`.port` to the pool, one protocol of :mod:`.events`. oMLX gets
this folder as it is (``patches/``).

- :mod:`.policy` decides: plain functions of a view of the pool and the time.
- :mod:`.queue` carries decisions out and waits; :mod:`.quiesce` waits for one model.
- :mod:`.request` is the HTTP request behind a call, and :mod:`.refusal` the answer to a
  refused one, in the shape of its route.
"""
