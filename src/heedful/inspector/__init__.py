"""What a compiled AMD kernel will do on the chip, read off its assembly: no GPU needed.

found = inspect(artifact.text, lds_bytes=artifact.shared_bytes)
print(table([found]))
"""

from heedful.inspector.inspection import Inspection, inspect
from heedful.inspector.resources import Occupancy, Resources
from heedful.inspector.tables import segments_table, table, to_json
from heedful.inspector.timeline import timeline_svg

__all__ = [
    "Inspection",
    "Occupancy",
    "Resources",
    "inspect",
    "segments_table",
    "table",
    "timeline_svg",
    "to_json",
]
