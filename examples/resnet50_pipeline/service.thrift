struct InferenceParams {
    1: required string uuid,
    2: required binary data,
}

struct InferenceResult {
    1: required string label,
    2: required double score,
}

service InferenceService {
    void ping(),
    InferenceResult infer_batch(1: InferenceParams params),
}
