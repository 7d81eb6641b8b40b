//! Forecasts on the command line.

use super::{World, expect};

#[test]
fn a_forecast_states_the_answer_first() {
    let world = World::new();
    let shown = world.run(&["forecast", "web", "--to", "beta"]);
    let lines: Vec<_> = shown.stdout.lines().collect();
    assert!(lines[0].starts_with("web from alpha to beta: will converge in "), "{shown:?}");
    let words =
        ["  total       ", "300 ms allowed", "  policy      pattern", "12.0 MiB/s", "300.0 MiB of 512.0 MiB"];
    expect(&shown, 0, &words, &[]);
    expect(
        &shown,
        0,
        &["4.9 ms: 9830 page faults of 500 ns", "104.9 MiB/s, assumed", "beta does not answer"],
        &[],
    );
    let stuck = world.run(&["forecast", "web", "--to", "far", "--fresh", "--max-passes", "9"]);
    let first = "web from alpha to far: will not converge: writes 310 MB/s, link carries 110 MB/s; hybrid would take ";
    assert!(stuck.code == Some(0) && stuck.stdout.starts_with(first), "{stuck:?}");
    expect(&stuck, 0, &["  instead     --policy hybrid: "], &[]);
    let asked = world.fake.asked().pop().unwrap();
    assert!(asked.contains(r#""max_passes":9"#) && asked.contains(r#""fresh":true"#), "{asked}");
    let (code, forecast) = world.json(&["forecast", "web", "--to", "beta"]);
    assert_eq!(
        (code, &forecast["policy"], &forecast["forecast"]["converges"]),
        (0, &"pattern".into(), &true.into())
    );
    assert!(
        forecast["forecast"]["total_ns"]["high"].as_u64() > forecast["forecast"]["total_ns"]["low"].as_u64()
    );
    expect(&world.run(&["forecast", "web", "--to", "tiny"]), 1, &[], &["pre-flight says no", "free some"]);
    for stdout in [&shown.stdout, &stuck.stdout] {
        let wide: Vec<_> = stdout.lines().filter(|line| line.chars().count() > 110).collect();
        assert!(wide.is_empty(), "{wide:#?}");
    }
}

#[test]
fn a_check_has_a_forecast_and_forecasts_have_a_record() {
    let world = World::new();
    let checked = world.run(&["migrate", "web", "--to", "beta", "--check", "--forecast"]);
    expect(&checked, 0, &["can be migrated", "will converge in "], &[]);
    let refused = world.run(&["migrate", "web", "--to", "tiny", "--check", "--forecast"]);
    expect(&refused, 1, &["cannot be migrated"], &[]);
    assert!(!refused.stdout.contains("converge"), "{refused:?}");
    expect(&world.run(&["migrate", "web", "--to", "beta", "--forecast"]), 2, &[], &["--check"]);
    let record = world.run(&["forecast", "--calibration"]);
    expect(&record, 0, &["of 1 forecasts", "web#6", "15 s", "31 ms", "converged"], &[]);
    let (code, record) = world.json(&["forecast", "--calibration"]);
    assert_eq!((code, &record["accuracy"]["forecasts"]), (0, &1.into()));
    assert_eq!((&record["forecasts"][0]["vm"], &record["forecasts"][0]["epoch"]), (&"web".into(), &6.into()));
}
