/// A target with its result.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    /// The measured property.
    pub what: String,
    /// The target.
    pub wanted: String,
    /// The result.
    pub found: String,
    /// True if the target was met.
    pub held: bool,
}
