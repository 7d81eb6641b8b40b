//! Arbitrary bytes as messages and greetings: good or errors, and what is good can be checked and comes back.
#![no_main]

use libfuzzer_sys::fuzz_target;
use proto::Message;
use proto::message::{Hello, Welcome};

fuzz_target!(|bytes: &[u8]| {
    let _ = serde_json::from_slice::<Hello>(bytes);
    let _ = serde_json::from_slice::<Welcome>(bytes);
    if let Ok(message) = serde_json::from_slice::<Message>(bytes) {
        let _ = message.validate();
        let json = serde_json::to_vec(&message).expect("what was read can be written");
        let decoded: Message = serde_json::from_slice(&json).expect("what was written can be read");
        assert_eq!(decoded, message);
    }
});
