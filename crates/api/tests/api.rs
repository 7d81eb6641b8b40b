//! The API over a real Unix socket, with a control that has no VMs behind it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests, beside the tests themselves")]

mod fake;

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use api::progress::{Phase, Standing};
use api::{
    AdoptRequest, CancelOutcome, ClaimRequest, Client, ClientError, Control, ForecastRequest, Limits,
    MigrateRequest, MigrationSelector, Problem, ProblemKind, RecoverAction, RecoverRequest, RegistryUse,
    Server, ServerError, serve,
};
use whimbrel_api as api;

use fake::{Fake, host, vm};

struct World {
    fake: Arc<Fake>,
    server: Server,
    client: Client,
    _folder: tempfile::TempDir,
}

fn world() -> World {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("run/agent.sock");
    let fake = Fake::new();
    let server = serve(&socket, Arc::clone(&fake) as Arc<dyn Control>).unwrap();
    let client = Client::new(&socket).unwrap();
    World { fake, server, client, _folder: folder }
}

/// Sends a request as bytes, and returns the answer as text, as far as it arrives: a server that has seen enough stops
/// reading.
fn raw(world: &World, request: &str) -> String {
    let mut stream = UnixStream::connect(world.server.socket()).unwrap();
    let mut writing = stream.try_clone().unwrap();
    let mut answer = Vec::new();
    thread::scope(|scope| {
        scope.spawn(move || writing.write_all(request.as_bytes()));
        let mut buffer = [0; 4096];
        while let Ok(bytes @ 1..) = stream.read(&mut buffer) {
            answer.extend_from_slice(&buffer[..bytes]);
        }
    });
    String::from_utf8(answer).unwrap()
}

fn send(world: &World, method: &str, path: &str, body: &str) -> (u16, Result<Problem, String>) {
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: agent\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    let answer = raw(world, &request);
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    (status, serde_json::from_str(body).map_err(|error| format!("{error}: {answer}")))
}

fn problem<T>(result: Result<T, ClientError>) -> Problem {
    match result {
        Err(ClientError::Problem(problem)) => problem,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it was done"),
    }
}

#[test]
fn only_the_owner_can_open_the_socket() {
    let world = world();
    let socket = world.server.socket().to_owned();
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(std::fs::read_dir(socket.parent().unwrap()).unwrap().count(), 1);
    world.client.agent().unwrap();
    world.server.stop();
    assert!(!socket.exists());
    assert!(matches!(world.client.agent(), Err(ClientError::NoAgent { .. })));
}

#[test]
fn a_dead_agents_socket_is_replaced_and_a_living_ones_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("agent.sock");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    assert!(socket.exists(), "left behind");
    let server = serve(&socket, Fake::new()).unwrap();
    assert!(matches!(serve(&socket, Fake::new()), Err(ServerError::InUse { .. })));
    Client::new(&socket).unwrap().agent().unwrap();
    drop(server);
    let long: PathBuf = folder.path().join("x".repeat(120));
    assert!(matches!(serve(&long, Fake::new()), Err(ServerError::TooLong { .. })));
}

#[test]
fn files_of_others_are_neither_replaced_nor_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("hosts"), "127.0.0.1 localhost").unwrap();
    std::os::unix::fs::symlink(path("hosts"), path("link")).unwrap();
    for name in ["hosts", "link"] {
        let refused = serve(&path(name), Fake::new());
        assert!(matches!(refused, Err(ServerError::NotASocket { .. })), "{name}: {refused:?}");
    }
    assert_eq!(std::fs::read_to_string(path("link")).unwrap(), "127.0.0.1 localhost");
    let _alive = std::os::unix::net::UnixDatagram::bind(path("datagrams")).unwrap();
    let refused = serve(&path("datagrams"), Fake::new());
    assert!(matches!(refused, Err(ServerError::Socket { .. })), "{refused:?}");

    // By the end something else may be in the socket's place.
    let server = serve(&path("agent.sock"), Fake::new()).unwrap();
    std::fs::rename(path("agent.sock"), path("moved.sock")).unwrap();
    std::fs::write(path("agent.sock"), "another's").unwrap();
    server.stop();
    assert_eq!(std::fs::read_to_string(path("agent.sock")).unwrap(), "another's");
}

#[test]
fn vms_are_listed_shown_adopted_and_forgotten() {
    let world = world();
    let names = |world: &World| -> Vec<String> {
        world.client.vms().unwrap().into_iter().map(|summary| summary.vm.as_str().to_owned()).collect()
    };
    assert_eq!(names(&world), ["db", "web"]);
    assert_eq!(world.client.vm(&vm("web")).unwrap().ram_kind, "anonymous");
    let adopted = world
        .client
        .adopt(&AdoptRequest { pid: Some(77), name: Some(vm("mail")), ..AdoptRequest::default() })
        .unwrap();
    assert_eq!((adopted.vm.vm.as_str(), adopted.findings.len()), ("mail", 1));
    let claim = |accept_risk| world.client.claim(&vm("db"), &ClaimRequest { accept_risk }).unwrap();
    assert!(!claim(false).done && claim(true).done);
    assert_eq!(world.client.forget(&vm("db")).unwrap().released, Some(true));
    assert_eq!(names(&world), ["mail", "web"]);
    let missing = problem(world.client.vm(&vm("db")));
    assert_eq!(missing.kind, ProblemKind::NotFound);
    assert!(missing.advice.contains("vm list"));
}

#[test]
fn which_vm_to_adopt_has_to_be_clear() {
    let world = world();
    let both = AdoptRequest { pid: Some(7), qemu_name: Some("x".into()), ..AdoptRequest::default() };
    for unclear in [AdoptRequest::default(), both] {
        assert_eq!(problem(world.client.adopt(&unclear)).kind, ProblemKind::BadRequest);
    }
    assert!(world.fake.asked().is_empty(), "nothing reached the control");
}

#[test]
fn a_migration_is_checked_started_watched_and_reported() {
    let world = world();
    let request = MigrateRequest::new(vm("web"), host("beta"));
    assert!(world.client.check(&request).unwrap().possible);
    assert!(world.client.migrations().unwrap().is_empty(), "a check starts nothing");
    let status = world.client.migrate(&request).unwrap();
    assert_eq!(status.id.epoch.0, 7);
    let lines: Vec<_> =
        world.client.progress(&vm("web"), MigrationSelector::Epoch(7)).unwrap().map(Result::unwrap).collect();
    assert_eq!(lines.last().unwrap().progress.standing, Standing::Done);
    assert_eq!(lines.last().unwrap().migration, status.id);
    let latest = world.client.migration(&vm("web"), MigrationSelector::Latest).unwrap();
    assert_eq!((latest.id, latest.standing), (status.id, Standing::Done));
    assert_eq!(
        world.client.report(&vm("web"), MigrationSelector::Latest).unwrap().schema,
        "whimbrel.report/2"
    );
    let kinds: Vec<_> =
        world.fake.asked().iter().map(|asked| asked.split(' ').next().unwrap().to_owned()).collect();
    assert_eq!(kinds, ["check", "migrate"]);
}

#[test]
fn a_watcher_gets_each_line_at_once_and_the_end() {
    let world = world();
    world.client.migrate(&MigrateRequest::new(vm("web"), host("far"))).unwrap();
    let mut lines = world.client.progress(&vm("web"), MigrationSelector::Latest).unwrap();
    // Arrives although the stream goes on.
    assert_eq!(lines.next().unwrap().unwrap().progress.phase, Phase::PreCopy);
    world.fake.finish("web");
    assert_eq!(lines.next().unwrap().unwrap().progress.standing, Standing::Done);
    assert!(lines.next().is_none());
}

#[test]
fn the_end_of_the_server_ends_streams() {
    let world = world();
    world.client.migrate(&MigrateRequest::new(vm("web"), host("far"))).unwrap();
    let mut lines = world.client.progress(&vm("web"), MigrationSelector::Latest).unwrap();
    lines.next().unwrap().unwrap();
    let stopping = thread::spawn(move || world.server.stop());
    assert!(lines.find_map(Result::err).is_none(), "the stream ends in order");
    stopping.join().unwrap();
}

#[test]
fn migrations_are_cancelled_recovered_and_limited() {
    let world = world();
    let start = |to: &str| world.client.migrate(&MigrateRequest::new(vm("web"), host(to))).unwrap();
    start("far");
    let limits = Limits { bandwidth_bytes_per_s: Some(1000), ..Limits::default() };
    assert_eq!(world.client.set_limits(&vm("web"), MigrationSelector::Latest, &limits).unwrap(), limits);
    assert_eq!(world.client.cancel(&vm("web"), MigrationSelector::Latest).unwrap(), CancelOutcome::Cancelled);
    assert_eq!(
        world.client.cancel(&vm("web"), MigrationSelector::Latest).unwrap(),
        CancelOutcome::AlreadyOver { standing: Standing::Failed }
    );
    start("limbo");
    let too_late = world.client.cancel(&vm("web"), MigrationSelector::Latest).unwrap();
    assert!(matches!(too_late, CancelOutcome::TooLate { .. }));
    let mut request =
        RecoverRequest { action: RecoverAction::RunHere, registry: RegistryUse::Asked, accept_risk: false };
    let described = world.client.recover(&vm("web"), MigrationSelector::Latest, &request).unwrap();
    assert!(!described.done && !described.risked.is_empty());
    request.accept_risk = true;
    assert!(world.client.recover(&vm("web"), MigrationSelector::Epoch(8), &request).unwrap().done);
}

#[test]
fn what_migrations_have_in_the_kernel_is_listed() {
    let world = world();
    assert_eq!(world.client.network().unwrap(), fake::network_state());
    for all in [false, true] {
        let released = world.client.release_network(&vm("web1"), all).unwrap();
        assert_eq!(released[0].to_string(), "web1#3");
    }
}

#[test]
fn images_that_were_left_are_listed_and_removed() {
    let world = world();
    assert_eq!(world.client.images().unwrap(), [fake::left_image()]);
    for epoch in [None, Some(3)] {
        assert_eq!(world.client.remove_images(&vm("web1"), epoch).unwrap(), [fake::left_image()]);
    }
    assert!(world.client.remove_ended_images(&vm("web1")).unwrap()[0].ended);
    assert_eq!(problem(world.client.remove_ended_images(&vm("web"))).kind, ProblemKind::NotFound);
    for (name, epoch) in [("web1", Some(4)), ("web", None)] {
        assert_eq!(problem(world.client.remove_images(&vm(name), epoch)).kind, ProblemKind::NotFound);
    }
}

#[test]
fn what_preflight_says_comes_with_the_refusal() {
    let world = world();
    let refused = problem(world.client.migrate(&MigrateRequest::new(vm("web"), host("tiny"))));
    assert_eq!((refused.kind, refused.findings.len()), (ProblemKind::Refused, 1));
}

#[test]
fn migrations_are_forecast_alone_and_with_their_check() {
    let world = world();
    let migration = MigrateRequest::new(vm("web"), host("beta"));
    let request = ForecastRequest { migration: migration.clone(), fresh: true };
    let forecast = world.client.forecast(&request).unwrap();
    assert!(forecast == fake::forecast(&migration) && forecast.found.forecast.converges);
    let check = |forecast| world.client.check(&MigrateRequest { forecast, ..migration.clone() }).unwrap();
    assert_eq!((check(true).forecast, check(false).forecast), (Some(Box::new(forecast)), None));
    assert_eq!(world.client.calibration().unwrap(), fake::calibration());
    let to_tiny = MigrateRequest::new(vm("web"), host("tiny"));
    let refused = problem(world.client.forecast(&ForecastRequest { migration: to_tiny, fresh: false }));
    assert_eq!((refused.kind, refused.findings.len()), (ProblemKind::Refused, 1));
    let asked = world.fake.asked();
    assert!(asked[0].contains(r#""fresh":true"#) && asked[1].contains(r#""forecast":true"#), "{asked:?}");
}

#[test]
fn bad_requests_get_a_problem_and_reach_nobody() {
    let world = world();
    let cases: &[(&str, &str, &str, u16, &str)] = &[
        ("GET", "/v2/vms", "", 404, "/v2/vms"),
        ("PUT", "/v1/vms", "", 405, "PUT"),
        ("POST", "/v1/migrations", "{", 400, "the request is invalid"),
        ("POST", "/v1/migrations", r#"{"vm":"web"}"#, 400, "missing field `to`"),
        ("POST", "/v1/migrations", r#"{"vm":"web","to":"beta","max_downtime":3}"#, 400, "max_downtime"),
        ("POST", "/v1/migrations", r#"{"vm":"../x","to":"beta"}"#, 400, "not a valid name"),
        ("GET", "/v1/vms/a%20b", "", 400, "not a valid name"),
        ("GET", "/v1/migrations/web/now", "", 400, "not a valid epoch"),
        ("DELETE", "/v1/images/web1/latest", "", 400, "not a valid epoch"),
        ("DELETE", "/v1/images", "", 405, "DELETE"),
        ("GET", "/v1/migrations/web/latest", "", 404, "no migration of web"),
        ("GET", "/v1/migrations/web/3", "", 404, "web#3"),
        ("POST", "/v1/migrations/web/3/limits", r#"{"bandwith":3}"#, 400, "bandwith"),
        ("POST", "/v1/migrations", r#"{"vm":"web","to":"beta","forecast":true}"#, 400, "not forecast"),
        ("POST", "/v1/forecasts", r#"{"vm":"web","to":"beta"}"#, 400, "vm"),
    ];
    for (method, path, body, status, word) in cases {
        let (found, answer) = send(&world, method, path, body);
        let problem = answer.unwrap_or_else(|error| panic!("{method} {path}: no problem document: {error}"));
        assert_eq!(found, *status, "{method} {path}: {problem:?}");
        assert!(problem.error.contains(word), "{method} {path}: {word:?} is missing in {problem:?}");
    }
    assert!(world.fake.asked().is_empty(), "{:?}", world.fake.asked());
    let large = format!("{{\"vm\":\"{}\"}}", "x".repeat(3 << 20));
    let (status, answer) = send(&world, "POST", "/v1/migrations", &large);
    assert!(
        status == 400 && answer.as_ref().is_ok_and(|problem| problem.advice.contains("2 MB")),
        "{answer:?}"
    );
    assert!(raw(&world, "nonsense\r\n\r\n").contains("400"));
    world.client.agent().unwrap();
}

#[test]
fn a_control_that_panics_costs_one_request() {
    let world = world();
    let failed = problem(world.client.vm(&vm("panic")));
    assert_eq!(failed.kind, ProblemKind::Internal);
    assert!(failed.advice.contains("log"));
    assert!(world.client.vm(&vm("web")).is_ok());
}
