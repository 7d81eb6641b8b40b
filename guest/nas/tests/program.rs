//! The program as a guest starts it: its lines and its exit status.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

fn program(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_whimbrel-nas"));
    command.args(line.split_ascii_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn lines(output: &Output) -> Vec<String> {
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

/// Returns a line without its times.
fn timeless(line: &str) -> String {
    let words = line.split(' ').map(|word| if word.starts_with("ms=") { "ms=" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn it_tells_the_start_each_iteration_and_each_run() {
    let output = program("IS S --threads 2 --runs 2").output().unwrap();
    assert!(output.status.success());
    let lines: Vec<_> = lines(&output).iter().map(|line| timeless(line)).collect();
    let mut expected = vec!["NAS start kernel=IS class=S threads=2 bytes=794624".to_owned()];
    for run in 1..=2 {
        let tick = |iteration| format!("NAS tick kernel=IS class=S run={run} iteration={iteration} ms=");
        expected.extend((1..=10).map(tick));
        expected.push(format!("NAS run kernel=IS class=S run={run} verified=yes ms="));
    }
    assert_eq!(lines, expected);
}

#[test]
fn times_never_go_back() {
    let output = program("cg s").output().unwrap();
    let time = |line: &String| line.rsplit_once("ms=").and_then(|(_, ms)| ms.parse::<u64>().ok());
    let ticks: Vec<_> =
        lines(&output).iter().filter(|line| line.starts_with("NAS tick")).filter_map(time).collect();
    assert_eq!(ticks.len(), 15);
    assert!(ticks.is_sorted());
}

#[test]
fn bad_words_end_it_with_2_and_are_named() {
    for (line, named) in
        [("LU S", "LU"), ("CG S --runs never", "never"), ("CG S --peer here --listen 1", "here")]
    {
        let output = program(line).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{line}");
        assert!(output.stdout.is_empty());
        assert!(String::from_utf8_lossy(&output.stderr).contains(named), "{line}");
    }
}

#[test]
fn two_of_them_share_the_work_until_one_is_killed() {
    // A port that was free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut one = program(&format!("CG S --runs forever --listen {port}")).spawn().unwrap();
    let mut other = program(&format!("CG S --runs forever --peer 127.0.0.1:{port}")).spawn().unwrap();
    for process in [&mut one, &mut other] {
        let lines = BufReader::new(process.stdout.as_mut().unwrap()).lines().map(Result::unwrap);
        let run = lines.skip_while(|line| !line.starts_with("NAS run")).nth(1).unwrap();
        assert_eq!(timeless(&run), "NAS tick kernel=CG class=S run=2 iteration=1 ms=");
    }
    one.kill().unwrap();
    one.wait().unwrap();
    let output = other.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("whimbrel-nas: "));
}
