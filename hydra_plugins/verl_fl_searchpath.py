"""Hydra finds this package by name and so learns where verl-fl's config groups are."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class VerlFLSearchPath(SearchPathPlugin):
    """Adds ``verl_fl/config`` to every Hydra application, so that ``+fl=cpu`` works in verl's own commands."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl-fl", path="pkg://verl_fl.config")
