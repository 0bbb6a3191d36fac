"""Labs by name, one file a chapter; each is a function that shows a panel (course.lab) and returns it.

labs.parameters()                         chapter 0: where a model's parameters are
labs.attention_reach(tokens=None)         chapter 1: who sees whom in the three families
labs.positions()                          chapter 1: how an attention score or a table knows the distance
labs.norms_at_depth()                     chapter 1: the residual stream and its gradient, layer by layer
labs.activations()                        chapter 1: the functions and their slopes
labs.ffn_width()                          chapter 1: 4h, 8h/3 and 2.7h in parameters
labs.attention_patterns()                 chapter 1: a pattern's work, reach and error
labs.state_memory()                       chapter 1: what a state of N numbers gives back of its past
labs.state_cost()                         chapter 1: a token's work and room, attention and state spaces by length
labs.token_budget()                       chapter 1: which patches of a picture stay, and what its caption loses
labs.routing()                            chapter 1: load, drops and balance loss of each router on the same tokens
labs.optimizer_surface()                  chapter 2: the way of an optimizer down a valley
labs.schedules()                          chapter 2: five learning-rate schedules
labs.loss_scaling()                       chapter 2: which gradients a format holds, and what a loss scale does for them
labs.next_token()                         chapter 2: what temperature, top-k, top-p and min-p leave of a next token
labs.lora_rank()                          chapter 2: how much of an update two thin matrices can hold
labs.kl_coefficient()                     chapter 2: reward, what it stands for, and drift, at six prices of drift
labs.clip_range()                         chapter 2: PPO's objective of a token against its ratio
labs.hnsw_steps()                         chapter 2: a search through layers of a graph, step by step
labs.intensity()                          chapter 3: operations a byte of a block's parts, along one dial
labs.under_the_roof()                     chapter 3: a model's parts under the roof of an accelerator
labs.tile_walk()                          chapter 3: FlashAttention tile by tile: scores made, held on chip, moved
labs.two_buffers()                        chapter 3: loads and multiplications in time, by the number of buffers
labs.fused_chain()                        chapter 3: a chain and a norm in many kernels, in two and in one
labs.isoflop_curve()                      chapter 3: loss over size at one budget, and how flat its bottom is
labs.overtraining()                       chapter 3: the size that is cheapest to train and then to use
"""

from importlib import import_module

_FRONT = {"parameters": "start"}
_FRONT |= dict.fromkeys(("attention_reach", "positions", "norms_at_depth", "activations", "ffn_width"), "blocks")
_FRONT |= {"attention_patterns": "patterns", "state_memory": "states", "state_cost": "states", "token_budget": "vision"}
_FRONT |= {"routing": "experts"}
_FRONT |= {"optimizer_surface": "training", "schedules": "training"}
_FRONT |= {"kl_coefficient": "preferences", "clip_range": "preferences"}
_FRONT |= {"loss_scaling": "pretraining"}
_FRONT |= {"hnsw_steps": "retrieval"}
_FRONT |= {"lora_rank": "finetune"}
_FRONT |= {"next_token": "sampling"}
_FRONT |= {"intensity": "counting", "under_the_roof": "counting"}
_FRONT |= {"tile_walk": "kernels", "two_buffers": "kernels"}
_FRONT |= {"fused_chain": "fusion"}
_FRONT |= {"isoflop_curve": "scaling", "overtraining": "scaling"}

__all__ = list(_FRONT)


def __getattr__(name: str):
    if name in _FRONT:
        return getattr(import_module(f"llmstack.course.labs.{_FRONT[name]}"), name)
    raise AttributeError(f"no lab {name!r}; there are {', '.join(_FRONT)}")
