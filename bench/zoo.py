"""The models of the project: one registry for the tests, the demo and the benchmarks.

    entry = ZOO["bert"]
    example = entry.build("real", training=True)        # a module in train mode and the inputs to call it with
    entry.loss(example.module(**example.inputs)).backward()

Architectures come from `transformers` configurations with random, seeded weights, so nothing is downloaded. The
library is heavy and optional (the extras `dev` and `bench`), so the builders import it, and importing this module costs
no more than importing torch. The models that `transformers` does not have (recurrent, recommender, plain
feed-forward) are written out here.

Every entry has two sizes. "small" is for tests: two layers, narrow, inputs of a few dozen elements. "real" is for the
demo and the benchmarks: published widths and input sizes, with four layers where the published model repeats one
layer, since more of the same layer only costs time. Building leaves torch's random state as it was found.

What stays the library's default: the attention implementation (sdpa), dropout, initialisation, loss. What does not:
layer drop and spectrogram masking of the audio models, which a random draw in Python decides, so that every step would
run another graph; and the cache, which decoders return only if the caller asks for it with `use_cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Size: TypeAlias = Literal["small", "real"]
Inputs: TypeAlias = dict[str, Tensor]

FAMILIES = (
    "encoder",
    "decoder",
    "encoder-decoder",
    "vision",
    "audio",
    "cnn",
    "mixture-of-experts",
    "state-space",
    "recurrent",
    "recommender",
    "feed-forward",
)


@dataclass(frozen=True)
class Shape:
    """How much goes in at once. `length` is tokens, pixels along a side, samples of sound or width, by family."""

    batch: int
    length: int


@dataclass(frozen=True)
class Example:
    """A module and the keyword arguments to call it with."""

    module: nn.Module
    inputs: Inputs

    def __call__(self) -> Any:
        return self.module(**self.inputs)


@dataclass(frozen=True)
class Entry:
    """One model. `build` is what callers want; the fields are what it is made from."""

    name: str
    family: str
    make_module: Callable[[Size], nn.Module]
    make_inputs: Callable[[nn.Module, Shape, bool], Inputs]  # the flag asks for labels, where the model has a loss
    shapes: dict[Size, Shape]

    def build(
        self,
        size: Size = "small",
        *,
        training: bool = False,
        batch: int | None = None,
        length: int | None = None,
        seed: int = 0,
    ) -> Example:
        """A fresh module and inputs; the same for the same arguments."""
        with seeded(seed):
            module = self.make_module(size).train(training)
        return Example(module, self.inputs(module, size, training=training, batch=batch, length=length, seed=seed))

    def inputs(
        self,
        module: nn.Module,
        size: Size = "small",
        *,
        training: bool = False,
        batch: int | None = None,
        length: int | None = None,
        seed: int = 0,
    ) -> Inputs:
        """Inputs alone, for another batch size, another length or another draw."""
        default = self.shapes[size]
        shape = Shape(batch or default.batch, length or default.length)
        with seeded(seed + 1):
            return self.make_inputs(module, shape, training)

    def loss(self, output: Any) -> Tensor:
        """The scalar to differentiate: the model's own loss if it returned one, else the mean square of its outputs."""
        own = getattr(output, "loss", None)
        if own is not None:
            return own
        return mean_square(output)


def mean_square(output: Any) -> Tensor:
    """A smooth scalar that depends on every element of every floating output."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.square().mean() for leaf in leaves]).sum()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from `seed` inside, and leave the process's generator untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


# --- inputs ------------------------------------------------------------------------------------------------------


def token_ids(module: nn.Module, shape: Shape) -> Tensor:
    """Ids above the few that configurations reserve for padding, start and end."""
    return torch.randint(5, module.config.vocab_size, (shape.batch, shape.length))


def padding_mask(shape: Shape) -> Tensor:
    """Row `i` ends in `i` padded positions, so a batch really has sentences of several lengths."""
    kept = torch.full((shape.batch, 1), shape.length) - torch.arange(shape.batch)[:, None] % shape.length
    return (torch.arange(shape.length)[None, :] < kept).long()


def sentences(module: nn.Module, shape: Shape, training: bool) -> Inputs:
    """Padded sentences, one class each."""
    inputs = {"input_ids": token_ids(module, shape), "attention_mask": padding_mask(shape)}
    if training:
        inputs["labels"] = torch.randint(0, module.config.num_labels, (shape.batch,))
    return inputs


def tokens(module: nn.Module, shape: Shape, training: bool) -> Inputs:
    """Unpadded text; the labels of a language model are its own tokens."""
    ids = token_ids(module, shape)
    return {"input_ids": ids, "labels": ids.clone()} if training else {"input_ids": ids}


def tokens_only(module: nn.Module, shape: Shape, training: bool) -> Inputs:
    """Padded text for a model that ends in hidden states and has no loss of its own."""
    return {"input_ids": token_ids(module, shape), "attention_mask": padding_mask(shape)}


def text_pairs(module: nn.Module, shape: Shape, training: bool) -> Inputs:
    """Source and target text; the target is half as long. Training lets the model shift the labels itself."""
    target = token_ids(module, Shape(shape.batch, max(2, shape.length // 2)))
    inputs = {"input_ids": token_ids(module, shape), "attention_mask": padding_mask(shape)}
    inputs["labels" if training else "decoder_input_ids"] = target
    return inputs


def images(module: nn.Module, shape: Shape, training: bool) -> Inputs:
    """Square pictures of `length` pixels a side, one class each."""
    inputs = {"pixel_values": torch.randn(shape.batch, 3, shape.length, shape.length)}
    if training:
        inputs["labels"] = torch.randint(0, module.config.num_labels, (shape.batch,))
    return inputs


def captioned_images(module: nn.Module, shape: Shape, training: bool) -> Inputs:
    """Pictures and a caption for each; a caption ends in the end-of-text token, whose state stands for the whole."""
    config = module.config
    side = config.vision_config.image_size
    ids = torch.randint(5, config.text_config.vocab_size, (shape.batch, shape.length))
    ids[:, -1] = config.text_config.eos_token_id
    return {"input_ids": ids, "pixel_values": torch.randn(shape.batch, 3, side, side)}


def spectrograms(module: nn.Module, shape: Shape, training: bool) -> Inputs:
    """Mel frames for the encoder and `length` tokens for the decoder; the encoder takes its one published length."""
    config = module.config
    inputs = {"input_features": torch.randn(shape.batch, config.num_mel_bins, 2 * config.max_source_positions)}
    inputs["labels" if training else "decoder_input_ids"] = token_ids(module, shape)
    return inputs


def waveforms(module: nn.Module, shape: Shape, training: bool) -> Inputs:
    """Sound at its sampling rate, one class a recording."""
    inputs = {"input_values": torch.randn(shape.batch, shape.length)}
    if training:
        inputs["labels"] = torch.randint(0, module.config.num_labels, (shape.batch,))
    return inputs


def recurrent_tokens(module: nn.Module, shape: Shape, training: bool) -> Inputs:
    return {"ids": torch.randint(0, module.embed.num_embeddings, (shape.batch, shape.length))}


def clicks(module: nn.Module, shape: Shape, training: bool) -> Inputs:
    """Dense features and, for each table, bags of 1 to `length` ids laid end to end, with where each bag starts."""
    sizes = torch.randint(1, shape.length + 1, (module.table_count, shape.batch))
    sizes[:, 0] += shape.length * shape.batch - sizes.sum(
        dim=1
    )  # every table gets the same count, so one tensor holds all
    starts = sizes.cumsum(dim=1) - sizes
    ids = torch.randint(0, module.row_count, (module.table_count, shape.length * shape.batch))
    return {"dense": torch.randn(shape.batch, module.dense_width), "ids": ids, "starts": starts}


def features(module: nn.Module, shape: Shape, training: bool) -> Inputs:
    return {"x": torch.randn(shape.batch, module.first.in_features)}


def classifier(make: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    """A model with one label an input. Unless told, the library finds that out from the labels of the first call and
    notes it in the configuration, so that the second call does not meet the first one's guards and compiles again."""
    config.problem_type = "single_label_classification"
    return make(config)


# --- encoders and decoders of text -------------------------------------------------------------------------------


def bert(size: Size) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    if size == "real":
        return classifier(BertForSequenceClassification, BertConfig(num_hidden_layers=4))
    return classifier(
        BertForSequenceClassification,
        BertConfig(
            vocab_size=99,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=64,
        ),
    )


def roberta(size: Size) -> nn.Module:
    from transformers import RobertaConfig, RobertaForMaskedLM

    if size == "real":
        return RobertaForMaskedLM(
            RobertaConfig(vocab_size=50265, num_hidden_layers=4, max_position_embeddings=514, type_vocab_size=1)
        )
    return RobertaForMaskedLM(
        RobertaConfig(
            vocab_size=99,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=64,
            type_vocab_size=1,
        )
    )


def distilbert(size: Size) -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    if size == "real":
        return classifier(DistilBertForSequenceClassification, DistilBertConfig(n_layers=4))
    return classifier(
        DistilBertForSequenceClassification,
        DistilBertConfig(vocab_size=99, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=64),
    )


def t5_encoder(size: Size) -> nn.Module:
    from transformers import T5EncoderModel

    return T5EncoderModel(t5_config(size))


def gpt2(size: Size) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    if size == "real":
        config = GPT2Config(n_layer=4, use_cache=False)
    else:
        config = GPT2Config(
            vocab_size=99,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        )
    module = GPT2LMHeadModel(config)
    # The library derives the loss from the class name, logs a warning that this one has none and takes the same loss;
    # the warning would break the graph.
    module.loss_type = "ForCausalLM"
    return module


def llama(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    if size == "real":  # the 1B width; the vocabulary is the one of Llama 2
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=2048,
                intermediate_size=5632,
                num_hidden_layers=4,
                num_attention_heads=32,
                num_key_value_heads=4,
                use_cache=False,
            )
        )
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


def qwen2(size: Size) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if size == "real":  # the 0.5B width
        return Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=32000,
                hidden_size=896,
                intermediate_size=4864,
                num_hidden_layers=4,
                num_attention_heads=14,
                num_key_value_heads=2,
                tie_word_embeddings=True,
                use_cache=False,
            )
        )
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def mistral(size: Size) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    if size == "real":
        return MistralForCausalLM(
            MistralConfig(
                hidden_size=1024,
                intermediate_size=3584,
                num_hidden_layers=4,
                num_attention_heads=16,
                num_key_value_heads=4,
                sliding_window=64,
                use_cache=False,
            )
        )
    return MistralForCausalLM(  # a window shorter than the text, so that it matters
        MistralConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            sliding_window=6,
            use_cache=False,
        )
    )


def mixtral(size: Size) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    if size == "real":
        return MixtralForCausalLM(
            MixtralConfig(
                hidden_size=512,
                intermediate_size=1792,
                num_hidden_layers=4,
                num_attention_heads=8,
                num_key_value_heads=2,
                num_local_experts=8,
                num_experts_per_tok=2,
                use_cache=False,
            )
        )
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


def olmoe(size: Size) -> nn.Module:
    """Many small experts, and each token's weights gathered for one batched product: what the library advises for few
    tokens. Mixtral keeps the default, a grouped product that is an operator of its own."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    if size == "real":
        config = OlmoeConfig(
            hidden_size=512,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=8,
            num_experts=64,
            num_experts_per_tok=8,
            use_cache=False,
        )
    else:
        config = OlmoeConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        )
    config._experts_implementation = "batched_mm"
    return OlmoeForCausalLM(config)


def mamba(size: Size) -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    if size == "real":
        return MambaForCausalLM(MambaConfig(vocab_size=32000, num_hidden_layers=4, use_cache=False))
    return MambaForCausalLM(
        MambaConfig(vocab_size=99, hidden_size=32, state_size=8, num_hidden_layers=2, use_cache=False)
    )


# --- from one text to another ------------------------------------------------------------------------------------


def t5_config(size: Size) -> Any:
    """T5-small, or a narrow one; the encoder alone and the whole model share it."""
    from transformers import T5Config

    if size == "real":
        return T5Config(num_layers=4, decoder_start_token_id=0, use_cache=False)
    return T5Config(
        vocab_size=99,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )


def t5(size: Size) -> nn.Module:
    from transformers import T5ForConditionalGeneration

    return T5ForConditionalGeneration(t5_config(size))


def bart(size: Size) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    if size == "real":
        return BartForConditionalGeneration(
            BartConfig(
                d_model=768,
                encoder_layers=4,
                decoder_layers=4,
                encoder_attention_heads=12,
                decoder_attention_heads=12,
                encoder_ffn_dim=3072,
                decoder_ffn_dim=3072,
                use_cache=False,
            )
        )
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=99,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


# --- pictures ----------------------------------------------------------------------------------------------------


def vit(size: Size) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    if size == "real":
        return classifier(ViTForImageClassification, ViTConfig(num_hidden_layers=4, num_labels=1000))
    return classifier(
        ViTForImageClassification,
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=32,
            patch_size=8,
            num_labels=7,
        ),
    )


def swin(size: Size) -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    if size == "real":  # Swin-T
        return classifier(SwinForImageClassification, SwinConfig(num_labels=1000))
    return classifier(
        SwinForImageClassification,
        SwinConfig(
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            num_labels=7,
        ),
    )


def dinov2(size: Size) -> nn.Module:
    from transformers import Dinov2Config, Dinov2ForImageClassification

    if size == "real":
        return classifier(
            Dinov2ForImageClassification,
            Dinov2Config(num_hidden_layers=4, patch_size=14, image_size=224, num_labels=1000),
        )
    return classifier(
        Dinov2ForImageClassification,
        Dinov2Config(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            mlp_ratio=2,
            image_size=32,
            patch_size=8,
            drop_path_rate=0.1,
            num_labels=7,
        ),
    )


def clip(size: Size) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    if size == "real":  # ViT-B/32, four layers a tower
        return CLIPModel(CLIPConfig(text_config={"num_hidden_layers": 4}, vision_config={"num_hidden_layers": 4}))
    text = {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 98,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def resnet(size: Size) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    if size == "real":  # ResNet-50
        return classifier(ResNetForImageClassification, ResNetConfig(num_labels=1000))
    return classifier(
        ResNetForImageClassification, ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], num_labels=7)
    )


def convnext(size: Size) -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    if size == "real":  # ConvNeXt-T
        return classifier(ConvNextForImageClassification, ConvNextConfig(num_labels=1000))
    return classifier(
        ConvNextForImageClassification,
        ConvNextConfig(num_stages=2, hidden_sizes=[16, 32], depths=[1, 2], drop_path_rate=0.1, num_labels=7),
    )


def mobilenet_v2(size: Size) -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    if size == "real":
        return classifier(MobileNetV2ForImageClassification, MobileNetV2Config(num_labels=1000))
    return classifier(
        MobileNetV2ForImageClassification,
        MobileNetV2Config(image_size=32, depth_multiplier=0.25, min_depth=8, num_labels=7),
    )


# --- sound -------------------------------------------------------------------------------------------------------


def whisper(size: Size) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    if size == "real":  # Whisper tiny has four layers a side
        return WhisperForConditionalGeneration(WhisperConfig(use_cache=False))
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=99,
            num_mel_bins=16,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_source_positions=24,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
            dropout=0.1,
            use_cache=False,
        )
    )


def wav2vec2(size: Size) -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    if size == "real":
        return classifier(
            Wav2Vec2ForSequenceClassification,
            Wav2Vec2Config(num_hidden_layers=4, num_labels=10, layerdrop=0.0, apply_spec_augment=False),
        )
    return classifier(
        Wav2Vec2ForSequenceClassification,
        Wav2Vec2Config(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            conv_dim=(16, 16, 16),
            conv_kernel=(10, 3, 2),
            conv_stride=(5, 2, 2),
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            classifier_proj_size=16,
            num_labels=5,
            layerdrop=0.0,
            apply_spec_augment=False,
        ),
    )


# --- written here ------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Token embedding, two layers of a recurrent cell with dropout between them, a class for each sequence.

    The steps are a loop over `nn.LSTMCell` or `nn.GRUCell`: Dynamo does not trace `nn.LSTM` and `nn.GRU` unless
    `torch._dynamo.config.allow_rnn` is set, so a model of those would never reach a backend.
    """

    def __init__(self, cell: type[nn.RNNCellBase], vocabulary: int, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.cells = nn.ModuleList([cell(width, hidden), cell(hidden, hidden)])
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(hidden, classes)

    def forward(self, ids: Tensor) -> Tensor:
        lower, upper = self.cells
        lower_state = upper_state = None  # the cells read this as zeros
        for step in self.embed(ids).unbind(dim=1):
            lower_state = lower(step, lower_state)
            upper_state = upper(self.dropout(hidden_of(lower_state)), upper_state)
        return self.head(hidden_of(upper_state))


def hidden_of(state: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """An LSTM carries a cell state beside the hidden state; a GRU has only the latter."""
    return state[0] if isinstance(state, tuple) else state


class Recommender(nn.Module):
    """The DLRM form: a dense tower, one bag of embeddings a table, all pairwise dot products, a tower on top."""

    def __init__(self, dense_width: int, row_count: int, table_count: int, width: int, hidden: int) -> None:
        super().__init__()
        self.dense_width, self.row_count, self.table_count = dense_width, row_count, table_count
        self.bottom = nn.Sequential(nn.Linear(dense_width, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(row_count, width, mode="sum") for _ in range(table_count))
        pair_count = (table_count + 1) * table_count // 2
        self.top = nn.Sequential(nn.Linear(width + pair_count, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Sigmoid())
        self.register_buffer("pairs", torch.tril_indices(table_count + 1, table_count + 1, offset=-1), persistent=False)

    def forward(self, dense: Tensor, ids: Tensor, starts: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        bags = [table(ids[i], starts[i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack([bottom, *bags], dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, products], dim=1))


class FeedForward(nn.Module):
    """Three linears with an activation between them."""

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.third = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.third(nn.functional.gelu(self.second(hidden)))


def lstm(size: Size) -> nn.Module:
    if size == "real":
        return Recurrent(nn.LSTMCell, vocabulary=32000, width=512, hidden=512, classes=10)
    return Recurrent(nn.LSTMCell, vocabulary=99, width=16, hidden=24, classes=7)


def gru(size: Size) -> nn.Module:
    if size == "real":
        return Recurrent(nn.GRUCell, vocabulary=32000, width=512, hidden=512, classes=10)
    return Recurrent(nn.GRUCell, vocabulary=99, width=16, hidden=24, classes=7)


def dlrm(size: Size) -> nn.Module:
    if size == "real":
        return Recommender(dense_width=13, row_count=100_000, table_count=26, width=64, hidden=512)
    return Recommender(dense_width=13, row_count=50, table_count=4, width=8, hidden=16)


def mlp(size: Size) -> nn.Module:
    if size == "real":
        return FeedForward(width=1024, hidden=4096, classes=1024)
    return FeedForward(width=12, hidden=32, classes=7)


# --- the registry ------------------------------------------------------------------------------------------------


def entry(
    family: str,
    make_module: Callable[[Size], nn.Module],
    make_inputs: Callable[[nn.Module, Shape, bool], Inputs],
    small: tuple[int, int],
    real: tuple[int, int],
) -> Entry:
    """A row of the registry: the builder's name is the model's, and a shape is (batch, length)."""
    shapes: dict[Size, Shape] = {"small": Shape(*small), "real": Shape(*real)}
    return Entry(make_module.__name__, family, make_module, make_inputs, shapes)


ENTRIES = (
    entry("encoder", bert, sentences, small=(2, 12), real=(8, 128)),
    entry("encoder", roberta, tokens, small=(2, 12), real=(4, 128)),
    entry("encoder", distilbert, sentences, small=(2, 12), real=(8, 128)),
    entry("encoder", t5_encoder, tokens_only, small=(2, 12), real=(8, 128)),
    entry("decoder", gpt2, tokens, small=(2, 12), real=(4, 128)),
    entry("decoder", llama, tokens, small=(2, 12), real=(1, 128)),
    entry("decoder", qwen2, tokens, small=(2, 12), real=(2, 128)),
    entry("decoder", mistral, tokens, small=(2, 12), real=(2, 128)),
    entry("encoder-decoder", t5, text_pairs, small=(2, 12), real=(4, 128)),
    entry("encoder-decoder", bart, text_pairs, small=(2, 12), real=(2, 128)),
    entry("vision", vit, images, small=(2, 32), real=(8, 224)),
    entry("vision", swin, images, small=(2, 32), real=(4, 224)),
    entry("vision", dinov2, images, small=(2, 32), real=(4, 224)),
    entry("vision", clip, captioned_images, small=(2, 8), real=(8, 32)),
    entry("cnn", resnet, images, small=(2, 32), real=(8, 224)),
    entry("cnn", convnext, images, small=(2, 32), real=(8, 224)),
    entry("cnn", mobilenet_v2, images, small=(8, 64), real=(8, 224)),
    entry("audio", whisper, spectrograms, small=(2, 6), real=(1, 32)),
    entry("audio", wav2vec2, waveforms, small=(2, 800), real=(2, 16000)),
    entry("mixture-of-experts", mixtral, tokens, small=(2, 12), real=(2, 128)),
    entry("mixture-of-experts", olmoe, tokens, small=(2, 8), real=(1, 16)),
    entry("state-space", mamba, tokens, small=(2, 5), real=(1, 64)),
    entry("recurrent", lstm, recurrent_tokens, small=(2, 4), real=(32, 32)),
    entry("recurrent", gru, recurrent_tokens, small=(2, 4), real=(32, 32)),
    entry("recommender", dlrm, clicks, small=(4, 3), real=(256, 4)),
    entry("feed-forward", mlp, features, small=(4, 12), real=(64, 1024)),
)

ZOO: dict[str, Entry] = {row.name: row for row in ENTRIES}
