import penstock


@penstock.model(max_batch_size=32)
class Uppercase:
    def predict(self, items: list[str]) -> list[str]:
        return [text.upper() for text in items]
