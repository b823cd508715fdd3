// Tests without a GPU always run.
namespace k3::test {
const char* reason_to_skip();
const char* reason_to_skip() { return nullptr; }
}  // namespace k3::test
