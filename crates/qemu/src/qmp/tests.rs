use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;

use std::os::fd::OwnedFd;

use super::*;

const GREETING: &str =
    r#"{"QMP":{"version":{"qemu":{"micro":2,"minor":0,"major":10},"package":"x"},"capabilities":["oob"]}}"#;

pub(crate) struct Fake {
    lines: BufReader<UnixStream>,
    out: UnixStream,
}

impl Fake {
    fn say(&mut self, text: &str) {
        self.out.write_all(text.as_bytes()).unwrap();
        self.out.write_all(b"\n").unwrap();
    }
    pub(crate) fn receive(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or(Value::Null)
    }
    pub(crate) fn answer(&mut self, id: &Value, value: &Value) {
        self.say(&json!({"return": value, "id": id}).to_string());
    }
}

/// Starts a monitor that negotiates and then runs the test's script.
pub(crate) fn fake(
    script: impl FnOnce(&mut Fake) + Send + 'static,
) -> (Qmp, JoinHandle<()>, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut fake = Fake { lines: BufReader::new(stream.try_clone().unwrap()), out: stream };
        fake.say(GREETING);
        let hello = fake.receive();
        fake.answer(&hello["id"], &json!({}));
        script(&mut fake);
    });
    (Qmp::connect(&path, Duration::from_secs(20)).unwrap(), thread, dir)
}

/// All are sent before any is answered, and an error among the answers does not shift the others.
#[test]
fn many_commands_are_asked_at_once() {
    let (mut qmp, thread, _dir) = fake(|fake| {
        let asked: Vec<Value> = (0..3).map(|_| fake.receive()).collect();
        for (number, asked) in asked.iter().enumerate() {
            fake.answer(&asked["id"], &json!(format!("{} {number}", asked["arguments"]["command-line"])));
        }
        let asked: Vec<Value> = (0..2).map(|_| fake.receive()).collect();
        fake.say(
            &json!({"error": {"class": "GenericError", "desc": "no"}, "id": asked[0]["id"]}).to_string(),
        );
        fake.answer(&asked[1]["id"], &json!("late"));
        let asked = fake.receive();
        fake.answer(&asked["id"], &json!({"status": "running"}));
    });
    let lines = ["a", "b", "c"].map(str::to_owned);
    assert_eq!(qmp.hmp_all(&lines).unwrap(), ["\"a\" 0", "\"b\" 1", "\"c\" 2"]);
    assert!(matches!(qmp.hmp_all(&lines[..2]), Err(QmpError::CommandFailed { .. })));
    let answer: Value = qmp.execute("query-status", Value::Null).unwrap();
    assert_eq!(answer["status"], "running");
    thread.join().unwrap();
}

#[test]
fn events_between_are_collected_and_answers_matched() {
    let (mut qmp, thread, _dir) = fake(|fake| {
        let asked = fake.receive();
        fake.say(r#"{"event":"STOP","timestamp":{"seconds":1,"microseconds":2}}"#);
        fake.say(r#"{"return":"late","id":999}"#);
        fake.say("");
        fake.say(r#"{"event":"RESUME","data":{"a":1},"timestamp":{"seconds":1,"microseconds":3}}"#);
        fake.answer(&asked["id"], &json!({"status": "running"}));
    });
    let answer: Value = qmp.execute("query-status", Value::Null).unwrap();
    assert_eq!(answer["status"], "running");
    let deadline = Instant::now();
    assert_eq!(qmp.wait_event("RESUME", deadline).unwrap().data["a"], 1);
    assert_eq!(qmp.wait_event("STOP", deadline).unwrap().timestamp_us, 1_000_002);
    thread.join().unwrap();
}

#[test]
fn a_late_answer_is_not_taken_for_the_next_one() {
    let (go, wait) = std::sync::mpsc::channel();
    let (mut qmp, thread, _dir) = fake(move |fake| {
        let first = fake.receive();
        wait.recv().unwrap();
        fake.answer(&first["id"], &json!("first"));
        let second = fake.receive();
        fake.answer(&second["id"], &json!("second"));
    });
    let error = qmp.execute_by::<Value>("slow", Value::Null, Instant::now() + Duration::from_millis(20));
    assert!(matches!(error, Err(QmpError::Timeout { waiting_for, .. }) if waiting_for == "slow"));
    go.send(()).unwrap();
    assert_eq!(qmp.execute::<Value>("quick", Value::Null).unwrap(), "second");
    thread.join().unwrap();
}

#[test]
fn errors_are_typed() {
    let (mut qmp, thread, _dir) = fake(|fake| {
        let asked = fake.receive();
        fake.say(
            &json!({"error": {"class": "CommandNotFound", "desc": "no such"}, "id": asked["id"]}).to_string(),
        );
        let asked = fake.receive();
        fake.answer(&asked["id"], &json!(17));
        fake.receive();
    });
    let error = qmp.execute::<Value>("nonsense", Value::Null).unwrap_err();
    assert!(matches!(&error, QmpError::CommandFailed { class, .. } if class == "CommandNotFound"));
    assert_eq!(error.to_string(), "QEMU refused nonsense: no such");
    assert!(matches!(qmp.execute::<String>("wrong", Value::Null), Err(QmpError::Answer { .. })));
    assert!(
        matches!(qmp.execute::<Value>("gone", Value::Null), Err(QmpError::Closed { during }) if during == "gone")
    );
    thread.join().unwrap();
}

#[test]
fn an_endless_line_is_refused() {
    let (mut qmp, thread, _dir) = fake(|fake| {
        fake.receive();
        let block = vec![b'x'; 1 << 20];
        while fake.out.write_all(&block).is_ok() {}
    });
    let error = qmp.execute::<Value>("flood", Value::Null).unwrap_err();
    assert!(matches!(error, QmpError::Protocol { .. }), "{error}");
    drop(qmp);
    thread.join().unwrap();
}

#[test]
fn a_held_monitor_is_busy_even_with_a_full_backlog() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let _listener = UnixListener::bind(&path).unwrap();
    let mut waiting = Vec::new();
    // Connections queue up until the kernel refuses more; each of them waits as ours does.
    while let Ok(stream) = connect_by(&path, Instant::now()) {
        waiting.push(stream);
        assert!(waiting.len() < 10_000);
    }
    let error = Qmp::connect(&path, Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, QmpError::Busy { .. }));
    waiting.clear();
}

#[test]
fn other_servers_are_not_taken_for_monitors() {
    let dir = tempfile::tempdir().unwrap();
    let error = Qmp::connect(&dir.path().join("none"), Duration::from_secs(1)).unwrap_err();
    assert!(matches!(error, QmpError::Connect { .. }));
    let path = dir.path().join("human");
    let listener = UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"QEMU 7.2.22 monitor - type 'help' for more information\n").unwrap();
    });
    let error = Qmp::connect(&path, Duration::from_secs(20)).unwrap_err();
    assert!(matches!(error, QmpError::Protocol { .. }));
    thread.join().unwrap();
}

#[test]
fn a_descriptor_is_passed() {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
    let (mut qmp, thread, _dir) = fake(|fake| {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut data = [0; 4096];
        let got = rustix::net::recvmsg(
            &fake.out,
            &mut [io::IoSliceMut::new(&mut data)],
            &mut control,
            RecvFlags::empty(),
        )
        .unwrap();
        let asked: Value = serde_json::from_slice(&data[..got.bytes]).unwrap();
        let fds: Vec<OwnedFd> = control
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds.collect::<Vec<_>>()),
                _ => None,
            })
            .flatten()
            .collect();
        assert_eq!(fds.len(), 1);
        std::fs::File::from(fds.into_iter().next().unwrap()).write_all(b"hello").unwrap();
        fake.answer(&asked["id"], &json!({"fdset-id": 3, "fd": 20}));
    });
    let (mut reader, writer) = io::pipe().unwrap();
    let answer: Value = qmp.execute_with_fd("add-fd", json!({}), writer.as_fd()).unwrap();
    assert_eq!(answer["fdset-id"], 3);
    drop(writer);
    thread.join().unwrap();
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text, "hello");
}

proptest::proptest! {
    /// Any line of a monitor is an answer, an event or an error, never a panic.
    #[test]
    fn no_line_of_a_monitor_panics(text in ".{0,200}", id in 0_u64..4) {
        if let Ok(message) = serde_json::from_str::<Value>(&text) {
            let _ = Reply::of(message.clone(), id);
            let _ = parse_greeting(&message);
        }
    }
}
