"""The queue of one engine pool, as a call of its ``get_engine`` meets it."""

from __future__ import annotations

from typing import Any

from .. import faults
from .. import request as requests
from ..held_models import held_by_request
from ..port import Ask
from ..queue import Admission, QueueBroken


class PoolAdmission(Admission):
    """:class:`~..queue.Admission` with the question that a call of the pool asks."""

    async def get_engine(
        self, model_id: str, force_lm: bool, lease: bool, runtime_settings: object | None
    ) -> Any:
        """Wait for the engine that such a call wants, one lease held; see :meth:`acquire`.

        Always with a lease: a caller that wanted none gives it back where nothing can come
        between the hand-out and the first use. A text engine is leased by all that want it
        to generate: a caller that does not want a lease needs no place of it.

        A model of a kind that the route of this request cannot serve is refused: nothing
        is loaded, and nothing evicted, for it.

        Raises:
            QueueBroken: the pool cannot be read; ask it itself.
            Exception: the pool's own error for a model that it cannot load.
        """
        ask = self._question(model_id, force_lm, lease, runtime_settings)
        request = requests.active()
        if request is not None and self.config.errors:
            self._refuse_wrong_kind(request, ask.target.model)
        return await self.acquire(ask)

    def _question(
        self, model_id: str, force_lm: bool, lease: bool, runtime_settings: object | None
    ) -> Ask:
        try:
            self.port.raise_if_unavailable(model_id)
            arguments: dict[str, Any] = {"model_id": model_id}
            if force_lm:
                arguments["force_lm"] = force_lm
            if runtime_settings is not None:
                arguments["runtime_settings"] = runtime_settings
            return Ask(
                self.port.target(model_id, force_lm, runtime_settings),
                self.port.size(arguments),
                arguments,
                held_by_request(model_id),
                unpaced=not lease,
            )
        except Exception as error:
            if faults.is_omlx(error):
                raise
            faults.note("the admission queue", error)
            raise QueueBroken from None

    def _refuse_wrong_kind(self, request: requests.Request, model: str) -> None:
        try:
            refusal = self.port.wrong_kind(request.path, model)
        except Exception as error:  # the route will say it, after the load
            faults.note("the kinds of models", error)
            return
        if refusal is not None:
            request.refusal = refusal
            raise self.port.refused(refusal)
