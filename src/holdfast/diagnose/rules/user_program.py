"""Rules for the program itself: exceptions, bad numbers, bad indices, bad arguments, slow ranks."""

from __future__ import annotations

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.rule import NO_FAULT_PATTERN, Role, Rule

# Written out, so that the combined search for all rules matches `loss: nan` and not `nan` alone, which takes five times
# as long. For the same reason a number in a pattern that begins with a common word, such as `rank`, has a bounded
# number of digits.
_NAN_VALUES = {
    rf"{name}['\"]?{sign}['\"]?nan\b": f"step 12: '{name}'{sign}nan"
    for name in ("grad_norm", "grad norm", "loss")
    for sign in (":", ": ", "=", "= ")
}

UNREACHABLE = Rule(
    code="service-unreachable",
    matches={
        r"HTTPS?ConnectionPool\(host='(?P<service>[^']{1,200})'": "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /api/models/x",
        r"HTTPS?ConnectionPool\(host=": "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /api/models/x",
        r"[Cc]ouldn't connect to '(?P<endpoint>https?://[^'\s]{1,200})'": "OSError: We couldn't connect to 'https://huggingface.co' to load this file, couldn't find it in the cached files.",
        r"Max retries exceeded with url": "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /api/models/x",
        r"LocalEntryNotFoundError": "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub",
        r"OfflineModeIsEnabled": "huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach https://huggingface.co: offline mode is enabled.",
        r"wandb: Network error": "wandb: Network error (ConnectTimeout), entering retry loop.",
        r"CommError: .{0,60}(?:timed out|[Nn]etwork)": "wandb.errors.CommError: Run initialization has timed out after 90.0 sec.",
        r"Couldn't reach (?P<resource>\S.{0,200})": "ConnectionError: Couldn't reach 'wikitext' on the Hub (ConnectionError)",
        r"urlopen error ": "urllib.error.URLError: <urlopen error [Errno -2] Name or service not known>",
        r"aiohttp\.client_exceptions\.\w+: Cannot connect to host (?P<target>[\w.:-]{1,200})": "aiohttp.client_exceptions.ClientConnectorError: Cannot connect to host data.example.com:443 ssl:default",
        r"requests\.exceptions\.(?:ConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError)\b(?:.{0,80}\(host='(?P<host>[^']{1,200})')?": "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /api/models/x",
        r"http(?:x|core)\.(?:Connect|Read)(?:Error|Timeout)": "httpx.ConnectTimeout: timed out",
        r"\b(?:429|50\d) (?:Server|Client) Error: .{0,100} for url: (?P<url>https?://[^/\s]{1,200})": "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: https://huggingface.co/api/datasets/x",
        r"urllib\.error\.HTTPError: HTTP Error (?:429|50\d)": "urllib.error.HTTPError: HTTP Error 503: Service Unavailable",
    },
    classes=(FailureClass.UNREACHABLE, FailureClass.FIREWALL),
    confidence=Confidence.LIKELY,
    message="data, a model hub or another service could not be reached: {host}: {service}: {endpoint}: {resource}: "
    "{target}: {url}",
    remedy=(
        "fetch it before the job and set HF_HUB_OFFLINE=1, WANDB_MODE=offline; or allow egress from the nodes "
        "(proxy, egress policy)",
    ),
    needs=("first-traceback", "service-reachable"),
    source="requests, urllib, aiohttp, httpx, huggingface_hub, datasets, wandb",
)

RULES: tuple[Rule, ...] = (
    Rule(
        code="index-out-of-range",
        matches={
            r"\.cu:\d+.{0,200}Assertion .{0,200}[Ff]ailed": '../aten/src/ATen/native/cuda/IndexKernel.cu:93: operator(): block: [3,0,0], thread: [17,0,0] Assertion `index >= -sizes[i] && index < sizes[i] && "index out of bounds"` failed.',
            r"Assertion `srcIndex < ": "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1289: indexSelectLargeIndex: block: [0,0,0], thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
            r"device-side assert triggered": "RuntimeError: CUDA error: device-side assert triggered",
            r"index out of range in self": "IndexError: index out of range in self",
            r"IndexError: (?:list|tuple|string)?.{0,20}index .{0,20}out of (?:range|bounds)": "IndexError: index out of range in self",
            r"IndexError: Target \S+ is out of bounds": "IndexError: Target 10 is out of bounds.",
            r"cudaErrorAssert": "torch.AcceleratorError: CUDA error: cudaErrorAssert: device-side assert",
        },
        classes=(FailureClass.NAN_DATA,),
        confidence=Confidence.LIKELY,
        message="an index in the data is out of range, such as a token id beyond the vocabulary or a label beyond the classes",
        remedy=(
            "check ids and labels against the embedding's and the head's size; CUDA_LAUNCH_BLOCKING=1 names the call",
        ),
        needs=("cuda-sync",),
        source="torch ATen/native/cuda",
    ),
    Rule(
        code="not-a-number",
        matches={
            r"found (?:NaN|Inf|unexpectedly large)[\w /]* in (?:local )?(?:forward|grad|loss)": "AssertionError: Rank 3: found NaN in local forward loss calculation. Device: 3, node: n1",
            r"(?i:loss (?:is|=|:|became|was) ?(?:nan|inf)\b)": "ValueError: loss is nan, stopping training",
            r"loss scale already at minimum": "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
            r"contains either `inf`, `nan`": "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
            r"FloatingPointError": "FloatingPointError: Minimum loss scale reached (0.0001).",
            r"(?i:nan (?:detected|loss|gradients?|encountered|in (?:loss|grad)))": "RuntimeError: NaN detected in the gradients of layer 3",
            r"cannot convert float NaN": "ValueError: cannot convert float NaN to integer",
            r"reducing loss scale to 0\.0$": "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 0.0",
            r"loss scale: 1(?:\.0)?, reducing to 1(?:\.0)?\b": "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1, reducing to 1",
            r"loss scale from 1(?:\.0)? to 1(?:\.0)?\b": "[deepspeed] OVERFLOW! Rank 0 Skipping step. Reducing dynamic loss scale from 1 to 1",
            r"Unexpected result (?:nan|inf)\b": "Unexpected result nan (message='grad norm') at iteration 12",
            r"Function '\w+' returned nan values": "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
            **_NAN_VALUES,
        },
        classes=(FailureClass.NAN_DATA,),
        confidence=Confidence.LIKELY,
        message="the loss or the gradients are NaN or infinite",
        remedy=(
            "roll back to the last checkpoint and skip the batches since; lower the learning rate, clip gradients, check the data of that step",
        ),
        needs=("first-traceback",),
        source="Megatron-LM, DeepSpeed, torch autograd anomaly mode",
    ),
    Rule(
        code="loss-not-a-number",
        matches={
            r"(?i:\bloss nan\b)": "iter 100 step 12: loss nan, iter time: 203.10ms",
        },
        classes=(FailureClass.NAN_DATA,),
        confidence=Confidence.LIKELY,
        message="the loss that a program prints is NaN or infinite",
        remedy=(
            "bf16 in place of fp16, or a loss scaler; clip gradients; a lower learning rate; check the data of the "
            "first such step",
        ),
        needs=("first-traceback",),
        source="training loops",
        performance_only=True,
    ),
    Rule(
        code="bad-data",
        matches={
            r"UnicodeDecodeError": "UnicodeDecodeError: 'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte",
            r"UnidentifiedImageError": "PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object at 0x7f>",
            r"JSONDecodeError": "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
            r"stack expects each tensor to be equal size": "RuntimeError: stack expects each tensor to be equal size, but got [3, 224, 224] at entry 0 and [1, 224, 224] at entry 1",
            r"image file is truncated": "OSError: image file is truncated (12 bytes not processed)",
            r"ArrowInvalid": "[default1]:[rank1]: pyarrow.lib.ArrowInvalid: Could not open Parquet input source '/home/ada/bad.parquet': Parquet file size is 33 bytes, smaller than the size reported by footer's (543517801bytes)",
            r"Corrupt(?:ed)? (?:JPEG|record|sample|shard)": "Corrupt JPEG data: premature end of data segment",
            r"(?:Bad|bad) CRC-32": "zipfile.BadZipFile: Bad CRC-32 for file 'a/1.jpg'",
            r"Expected (?:input )?batch_size \(\d+\) to match target": "ValueError: Expected input batch_size (32) to match target batch_size (31).",
            r"InvalidHeaderDeserialization": "safetensors_rust.SafetensorError: Error while deserializing header: InvalidHeaderDeserialization",
            r"zlib\.error": "zlib.error: Error -3 while decompressing data: incorrect header check",
            r"tarfile\.ReadError": "tarfile.ReadError: unexpected end of data",
        },
        classes=(FailureClass.NAN_DATA,),
        confidence=Confidence.LIKELY,
        message="a data sample is damaged or has another format",
        remedy=(
            "find the sample (the traceback names the reader), repair or skip it; check the dataset's files on that node",
        ),
        needs=("first-traceback",),
        source="data readers",
    ),
    Rule(
        code="straggler",
        matches={
            r"(?i:rank (?P<rank>\d{1,6}) is (?:a )?(?:straggler|slow|lagging))": "StragglerDetector: rank 12 is a straggler, GPU relative performance score 0.61",
            r"[Ss]traggler(?:s)? (?:detected|found)": "Stragglers detected: rank 5 on node n3",
            r"(?i:thermal (?:slowdown|throttl)|HW slowdown|clocks_throttle_reasons.*: Active|hw_(?:thermal_)?slowdown\W{1,4}active)": "        HW Thermal Slowdown                       : Active",
        },
        exclude=NO_FAULT_PATTERN,
        classes=(FailureClass.STRAGGLER,),
        confidence=Confidence.LIKELY,
        message="one rank is slower than the others",
        remedy=(
            "nvidia-smi -q -d PERFORMANCE,CLOCK on that node; take it out of use if it stays slow without the job",
        ),
        needs=("step-times",),
        source="NVRx, Megatron-LM, nvidia-smi",
        performance_only=True,
    ),
    Rule(
        code="low-bandwidth",
        matches={
            r"Avg bus bandwidth\s+: (?P<gbps>[\d.]+)": "# Avg bus bandwidth    : 3.33227",
        },
        role=Role.CONTEXT,
        classes=(FailureClass.GDR_MISSING, FailureClass.TCP_FALLBACK, FailureClass.ACS_IOMMU, FailureClass.OTHER),
        message="nccl-tests measured {gbps} GB/s; whether that is low depends on the machine and the transport",
        needs=("transport", "topology", "peermem"),
        source="nccl-tests common.cu",
    ),
    Rule(
        code="single-process-work",
        matches={
            r"(?:Map|Filter|Tokeniz\w+|[Rr]unning tokenizer[\w ]*|Generating \w+ split|Grouping texts[\w ]*|Packing[\w ]*|Preprocessing[\w ]*|Saving (?:model )?checkpoint|Loading checkpoint shards|Building \w+ index|Extracting \w+)(?: ?\([^)]{0,40}\))?[:\w /.-]{0,60}?\d{1,3}%\|": "Running tokenizer on dataset (num_proc=1):  61%|######    | 610000/1000000",
            r"\d{1,3}%\|.{0,80}(?:examples|samples|docs|files)/s": "Map:  34%|###4      | 12000/35000 [29:59<57:10,  6.71 examples/s]",
            r"[Tt]okeniz(?:ing|ation of) (?:the )?(?:\w+ )?(?:dataset|data|corpus|split|documents)": "Tokenizing the dataset:  12%|█▏        | 120/1000",
            r"Saving model checkpoint to": "Saving model checkpoint to output/checkpoint-500",
            r"building (?:the )?(?:shuffle|sample|document|indices|index)\w*.{0,40}(?:rank 0|on rank)": "building shuffle index on rank 0",
            r"on (?:the )?(?:main process|rank 0|rank zero) (?:only|first|alone)": "Preparing the data on rank 0 only",
        },
        role=Role.CONTEXT,
        message="one process does long work alone",
        source="datasets, transformers, Megatron-LM",
    ),
    UNREACHABLE,
    Rule(
        code="bad-arguments",
        matches={
            r"(?P<program>[\w./-]{1,100}): error: (?P<complaint>(?:unrecognized arguments|the following arguments are required|argument \S|ambiguous option|one of the arguments|too few arguments|invalid choice|unrecognized option).{0,300})": "train.py: error: unrecognized arguments: --learning-rate 1",
            r"\bError: (?P<refused>(?:No such (?:option|command)|Missing (?:option|argument|parameter|command)|Invalid value for|Got unexpected extra argument|Option '[^']{1,80}' (?:requires|does not)).{0,300})": "Error: No such option: --learning-rate",
            r"│ (?P<boxed>(?:Unrecognized options?|No such (?:option|command)|Missing (?:option|argument|command)|Invalid (?:value|choice)|Required options?|Got unexpected extra argument|Parsing error).{0,200}?) *│": "│ Unrecognized options: --learning-rate 1                │",
            r"(?P<override>Could not override '[^']{1,200}'|Error parsing override '[^']{1,200}'|Key '[^']{1,200}' is not in struct)": "Could not override 'optm.lr'.",
            r"(?P<unused>Some specified arguments are not used by the HfArgumentParser.{0,200})": "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--lrr', '1']",
            r"UnrecognizedFlagError: (?P<flag>.{1,200})": "absl.flags._exceptions.UnrecognizedFlagError: Unknown command line flag 'lrr'. Did you mean: lr ?",
        },
        exclude=r"unrecognized arguments: --local[-_]rank",
        classes=(FailureClass.USAGE,),
        confidence=Confidence.CERTAIN,
        message="the program rejected its command line: {complaint}: {refused}: {boxed}: {override}: {unused}: {flag}",
        remedy=("change the job's command; the program's own --help lists its options",),
        needs=("first-traceback",),
        source="argparse, click, typer, tyro, hydra, transformers, absl",
    ),
    Rule(
        code="mpirun-as-root",
        matches={
            r"(?:mpirun|mpiexec|prterun|orterun) has detected an attempt to run as root": "mpirun has detected an attempt to run as root.",
        },
        classes=(FailureClass.USAGE,),
        confidence=Confidence.CERTAIN,
        message="mpirun refuses to run as root",
        remedy=(
            "mpirun --allow-run-as-root, or OMPI_ALLOW_RUN_AS_ROOT=1 with OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; or run as another user",
        ),
        source="Open MPI",
    ),
    Rule(
        code="module-not-found",
        matches={
            r"ModuleNotFoundError: No module named '(?P<module>[^']+)'": "ModuleNotFoundError: No module named 'flash_attn'",
            r"No module named (?P<named>[\w.]+)$": "/usr/bin/python3: No module named torch",
        },
        classes=(FailureClass.PROGRAM_ERROR,),
        confidence=Confidence.LIKELY,
        message="a module is missing where the rank ran: {module}",
        remedy=(
            "`holdfast render` shows the interpreter: install the module there, in the image or the environment of "
            "every node",
            "your own module: it must exist where the job runs, with its folder on PYTHONPATH",
        ),
        needs=("first-traceback",),
        source="Python",
    ),
    Rule(
        code="file-not-found",
        matches={
            r"(?P<type>FileNotFoundError|PermissionError|NotADirectoryError): \[Errno \d+\] (?P<message>[^:]+): '(?P<path>[^']+)'": "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'",
        },
        classes=(FailureClass.PROGRAM_ERROR,),
        confidence=Confidence.LIKELY,
        message="the program could not open {path}: {message}",
        remedy=("the path must exist and be accessible on every node: a mount, a volume, the job's working folder",),
        needs=("first-traceback",),
        source="Python",
    ),
    Rule(
        code="session-storage-failed",
        matches={
            r"holdfast: error \[(?P<finding>disk-full|disk-error|read-only-file-system|checkpoint-failed|checkpoint-upload-failed|checkpoint-store-unreachable|no-valid-checkpoint|checkpoints-lost-with-pod|data-cache-unwritable)\]: (?P<message>.+)$": "holdfast: error [disk-full]: the checkpoint step-00000030 could not be written: no space is left on the disk",
        },
        exclude=r"; where: ",  # logged in one line, and the run continued
        classes=(FailureClass.STORAGE,),
        confidence=Confidence.CERTAIN,
        message="a holdfast.train Session ended the rank: {message}",
        remedy=("the lines below that one tell what to do; `holdfast explain {finding}` gives details",),
        source="holdfast.train",
    ),
    Rule(
        code="session-numbers-not-finite",
        matches={
            r"holdfast: error \[(?P<finding>weights-not-finite|loss-not-finite)\]: (?P<message>.+)$": "holdfast: error [weights-not-finite]: after step 14 weights are no longer finite, and rank 1 was the first",
        },
        exclude=r"; where: ",  # logged in one line, and the run continued
        classes=(FailureClass.NAN_DATA,),
        confidence=Confidence.CERTAIN,
        message="a holdfast.train Session ended the rank: {message}",
        remedy=("the lines below that one tell what to do; `holdfast explain {finding}` gives details",),
        source="holdfast.train",
    ),
    Rule(
        code="session-corruption",
        matches={
            r"holdfast: error \[(?P<finding>silent-corruption|ranks-diverged|replicas-diverged)\]: (?P<message>.+)$": "holdfast: error [silent-corruption]: after step 200 rank 1 computed other gradients than the other ranks, and nothing reported an error",
        },
        exclude=r"; where: ",  # logged in one line, and the run continued
        classes=(FailureClass.SILENT_CORRUPTION, FailureClass.PROGRAM_ERROR),
        confidence=Confidence.LIKELY,
        message="a holdfast.train Session ended the rank: {message}",
        remedy=("the lines below that one tell what to do; `holdfast explain {finding}` gives details",),
        needs=("all-ranks",),
        source="holdfast.train",
    ),
    Rule(
        code="session-failed",
        matches={
            r"holdfast: error \[(?P<finding>[a-z\d-]+)\]: (?P<message>.+)$": "holdfast: error [checkpoint-from-later-version]: the newest checkpoint has format 2; this holdfast reads up to 1",
        },
        exclude=r"; where: ",  # logged in one line, and the run continued
        classes=(FailureClass.PROGRAM_ERROR,),
        confidence=Confidence.CERTAIN,
        message="a holdfast.train Session ended the rank: {message}",
        remedy=("the lines below that one tell what to do; `holdfast explain {finding}` gives details",),
        source="holdfast.train",
        fallback=True,
    ),
    Rule(
        code="traceback",
        matches={
            r"Traceback \(most recent call last\)": "Traceback (most recent call last):",
        },
        role=Role.CONTEXT,
        message="a Python traceback begins",
        source="Python",
    ),
    Rule(
        code="python-exception",
        matches={
            r"(?:^|[\]:>|]\s*|\dZ?\s|pid=\d{1,10}(?:, ip=[\da-f.:]{1,45})?\) |std(?:out|err) F )(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|StopIteration))(?:: (?P<message>.*))?$": "ValueError: Unable to create tensor, you should probably activate truncation",
        },
        classes=(FailureClass.PROGRAM_ERROR,),
        confidence=Confidence.LIKELY,
        message="the program raised {type}: {message}",
        remedy=("fix what raised it: the traceback above the line has every frame on the way there",),
        needs=("first-traceback",),
        source="Python",
        fallback=True,
    ),
)
