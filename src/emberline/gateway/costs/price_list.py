"""PriceList: looks up the price of a model in the gateway's settings, then in the current catalogue."""

from __future__ import annotations

from emberline.gateway.core.cost import Price
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.costs.catalogue import CatalogueFiles


class PriceList:
    def __init__(self, files: CatalogueFiles) -> None:
        self._files = files

    def price(self, settings: GatewaySettings, provider: str, model: str) -> Price | None:
        own = settings.prices.get(f"{provider}/{model}") if settings.prices else None
        return own or self._files.current.price(provider, model)

    def max_output(self, provider: str, model: str) -> int | None:
        found = self._files.current.model(provider, model)
        return found.max_output if found is not None else None
