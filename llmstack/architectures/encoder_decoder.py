from torch import nn


class EncoderDecoder(nn.Module): ...
