"""Images made ready for the model on threads of their own, so that many are decoded at once and none in a step."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from PIL import Image

from deepinfer.config.model import VisionConfig
from deepinfer.core.errors import RequestError
from deepinfer.text.images import ImageInput, load_image, preprocess
from deepinfer.text.sources import ImageLike, ImageLimits

_MOST_THREADS = 8


class ImageLoader:
    """Opens, checks, resizes and cuts up the images of requests; decoding lets other Python threads run."""

    def __init__(self, vision: VisionConfig | None, limits: ImageLimits) -> None:
        """`vision`: None for a model that sees nothing, for which every image is an error."""
        if vision is not None:
            Image.init()  # not thread-safe, and otherwise left to the first file that is opened
        self._vision, self._limits = vision, limits
        self._threads = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "deepinfer-images")

    def start(self, sources: Sequence[ImageLike]) -> Callable[[], list[ImageInput]]:
        """Begin with the images of one request; the function waits for them, in their order.

        RequestError, now for images that the model or the limits do not allow, then for the first one that will not do.
        """
        if sources and self._vision is None:
            raise RequestError("this checkpoint has no vision tower; send text only")
        if len(sources) > self._limits.max_images:
            raise RequestError(
                f"the request has {len(sources)} images; max_images takes at most {self._limits.max_images}"
            )
        started = [self._threads.submit(self._prepare, source) for source in sources]
        return lambda: [_result(number, image) for number, image in enumerate(started)]

    def _prepare(self, source: ImageLike) -> ImageInput:
        if self._vision is None:
            raise RequestError("this checkpoint has no vision tower; send text only")
        image = preprocess(load_image(source, self._limits), self._vision)
        _ = image.digest  # which takes a while, so it is made here
        return image


def _result(number: int, image: Future[ImageInput]) -> ImageInput:
    try:
        return image.result()
    except RequestError as error:
        raise RequestError(f"image {number}: {error}") from error
    except Exception as error:  # no memory for it, for one: still this image's fault alone
        raise RequestError(f"image {number} cannot be prepared: {type(error).__name__}: {error}") from error
