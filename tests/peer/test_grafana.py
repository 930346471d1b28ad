"""Grafana's own model of a dashboard reads docs/grafana/spile.json, and gives all of it back."""

import json
import unittest

from support import TOP, need_package

BOARD = TOP / "docs" / "grafana" / "spile.json"


def differences(ours, theirs, at=""):
    """What is in `ours` and not the same in `theirs`, which may have more."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from differences(value, theirs.get(key, "nothing"), f"{at}/{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs)):
            yield from differences(*pair, f"{at}/{index}")
    elif ours != theirs:
        yield f"{at}: {ours!r} was read as {theirs!r}"


def read_back(board):
    """A dashboard as Grafana's model writes it after it has read it. A key that Grafana does not know is lost."""
    need_package("grafana_foundation_sdk")
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    # Each kind of panel and each data source has a model of its own.
    plugins.register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(board)))


class Dashboard(unittest.TestCase):
    def setUp(self):
        self.board = json.loads(BOARD.read_text())

    def test_nothing_is_lost(self):
        self.assertEqual(list(differences(self.board, read_back(self.board))), [])

    def test_a_key_that_grafana_does_not_know_is_noticed(self):
        self.board["panels"][1]["fieldConfig"]["defaults"]["units"] = "s"
        self.board["panels"][1]["targets"][0]["expression"] = "1"
        self.assertEqual(len(list(differences(self.board, read_back(self.board)))), 2)


if __name__ == "__main__":
    unittest.main()
