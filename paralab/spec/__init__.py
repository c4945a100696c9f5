"""What is trained (`ModelSpec`), how the step is split (`Plan`), and on what (`Cluster`).

plan.py, model.py and cluster.py define the three. settings.py and rules.py say which plans are
legal; forms.py checks the user's own schedule, block or passes; tiers.py has the places of
offloaded states; links.py the time of a call on the links of a cluster.
"""

from paralab.spec.cluster import Cluster, Link  # noqa: F401
from paralab.spec.forms import GRAD_SYNC_FORMS, OWN_FORM, SCHEDULE_NAMES  # noqa: F401
from paralab.spec.model import BYTES_PER_ELEMENT, MODEL_PRESETS, TIED, ModelSpec  # noqa: F401
from paralab.spec.plan import Place, Plan  # noqa: F401
