"""Own advice on many prompts: where they part, what makes them part, and which order or edit would share more.

One file for each kind of finding. Nothing here knows a bank, a model or MLX: prompts come as token ids and as documents
(`documents`), and every number of tokens is counted in the trie of prompts that were really rewritten.
"""

from prefixbank.advice.analysis import Analyzer, analyze, tools_of
from prefixbank.advice.results import Analysis, PartingPoint, Place, PromptFinding, Way

__all__ = ["Analysis", "Analyzer", "PartingPoint", "Place", "PromptFinding", "Way", "analyze", "tools_of"]
