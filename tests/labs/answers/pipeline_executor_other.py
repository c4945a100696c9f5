"""Lab 03's executor with messages that are asked for one action ahead.

For gloo. NCCL runs the single calls between two ranks in order, so that a receive holds up the send
behind it.
"""

import torch
import torch.distributed as dist


def pipeline_step_ahead(stage, actions, previous, following, batches, shape):
    def ask(action):
        """Begin to receive what this action needs: (tensor, work), or None."""
        source = previous if action[0] == "F" else following
        if source is None:
            return None
        tensor = torch.empty(shape, device=batches[0][0].device)
        return tensor, dist.irecv(tensor, source)

    in_flight, sent, total = {}, [], 0.0
    asked = ask(actions[0])
    for action, after in zip(actions, [*actions[1:], None], strict=True):
        message = None
        if asked is not None:
            message, work = asked
            work.wait()
        asked = None if after is None else ask(after)  # arrives while this action computes
        k = int(action[1:])
        if action[0] == "F":
            tokens, targets = batches[k]
            x = tokens if message is None else message.requires_grad_()
            y = stage(x, targets)
            if following is None:
                y = y / len(batches)
                total = total + y.detach()
            else:
                sent.append(dist.isend(y.detach(), following))
            in_flight[k] = x, y
        else:
            x, y = in_flight.pop(k)
            torch.autograd.backward(y, message)
            if previous is not None:
                sent.append(dist.isend(x.grad, previous))
            del x, y
    for work in sent:
        work.wait()
    return float(total)
