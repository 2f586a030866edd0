"""What the scripts beside this file are made of: stories, each with how it has to end."""

import asyncio
import json

from omlx._version import __version__
from packaging.version import Version

STORIES = {}


def ends(section, end, since=None):
    """A story that belongs to a section of the contract, and its end, as JSON has it.

    ``since`` has other ends by the release from which on they hold; a pre-release of a
    version counts as that version.
    """
    here = Version(__version__).release
    for version, later in (since or {}).items():
        if here >= Version(version).release:
            end = later

    def story(function):
        STORIES[function.__name__.removeprefix("story_")] = (section, end, function)
        return function

    return story


def tell(after=lambda: None):
    """Run all stories and print ``{name: [how it ended, how it has to end]}``."""
    told = {}
    for name, (_section, end, function) in STORIES.items():
        told[name] = [asyncio.run(function()), end]
        after()
    print(json.dumps(told), flush=True)
