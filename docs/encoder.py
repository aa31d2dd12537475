import torch
from torch import nn

import sparse_inductor


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.decoder = nn.Embedding(30522, 64), nn.Linear(64, 30522)

    def forward(self, ids, mask):
        logits = self.decoder(self.embed(ids))
        return (torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1)).amax(1)


sparse_inductor.enable()  # before the first call of what is compiled
encode = torch.compile(Encoder())  # the model stays as it is
weights = encode(torch.randint(0, 30522, (4, 128)), torch.ones(4, 128))
print(sparse_inductor.report())
