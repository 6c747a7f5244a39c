import numpy as np
import torch
from ts.torch_handler.image_classifier import ImageClassifier


class DigitClassifier(ImageClassifier):
    """Recognises a handwritten digit, white on black: {digit: probability}.

    ImageClassifier provides batching, the labels of index_to_name.json and explanations (integrated gradients).
    """

    topk = 1

    def image_processing(self, image):
        pixels = np.asarray(image.convert("L").resize((8, 8)), dtype=np.float32)
        return torch.from_numpy(pixels / 255).unsqueeze(0)
