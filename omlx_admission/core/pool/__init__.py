"""oMLX's engine pool as admission reads it.

- :mod:`.port` is the pool as the queue needs it, :mod:`.admission` its queue.
- :mod:`.ready` hands out what is loaded, :mod:`.holding` remembers to which request.
- :mod:`.errors` says what the pool's errors mean for a client.
- :mod:`.engines`, :mod:`.places`, :mod:`.ceiling` and :mod:`.marks` answer one question
  each: of an engine, its scheduler, the memory ceiling and an entry.

Nothing here is imported from oMLX: pool, module and errors are passed in.
"""
