"""The behaviour of a compiled kernel on the chip, read off its machine code: no GPU needed.

found = inspect(artifact.text, lds_bytes=artifact.shared_bytes)
print(table([found]))
"""

from heedful.inspector.command import of_artifact, of_program, render
from heedful.inspector.inspection import Inspection, inspect
from heedful.inspector.nvidia import NvidiaInspection, inspect_cubin
from heedful.inspector.resources import Occupancy, Resources
from heedful.inspector.tables import segments_table, table, to_json
from heedful.inspector.timeline import timeline_svg

__all__ = [
    "Inspection",
    "NvidiaInspection",
    "Occupancy",
    "Resources",
    "inspect",
    "inspect_cubin",
    "of_artifact",
    "of_program",
    "render",
    "segments_table",
    "table",
    "timeline_svg",
    "to_json",
]
