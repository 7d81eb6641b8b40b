//! Removal of secrets from descriptions: passwords and keys that are on a command line.

use serde_json::Value as Json;

use crate::cmdline::QemuOption;

/// Placeholder for a secret.
const REDACTED: &str = "(not kept)";

/// Returns a description, in JSON, without the secrets that its options hold in clear. A guest
/// cannot be built from the result.
pub fn redact_secrets(description: &Json) -> Json {
    let mut description = description.clone();
    let options = description.get_mut("options").and_then(Json::as_array_mut);
    for option in options.into_iter().flatten() {
        let Ok(given) = serde_json::from_value::<QemuOption>(option.clone()) else { continue };
        let mut value = given.parse_value();
        let kind = value.get("qom-type").unwrap_or_default();
        let is_secret_object = given.name == "object" && kind.starts_with("secret");
        let mut found = false;
        value.map_texts(&mut |key, _| {
            let is_secret =
                key == "password" || key.ends_with(".password") || (is_secret_object && key == "data");
            found |= is_secret;
            is_secret.then(|| REDACTED.to_owned())
        });
        if found && let Some(text) = option.get_mut("value") {
            *text = value.to_string().into();
        }
    }
    description
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn secrets_are_not_kept_and_all_else_is() {
        let option = |name: &str, value: &str| json!({ "name": name, "value": value });
        let description = json!({"schema": 1, "options": [
            option("object", "secret,id=s0,data=c2VjcmV0,format=base64"),
            option("object", r#"{"qom-type":"secret","id":"s1","data":"c2VjcmV0"}"#),
            option("object", "secret,id=s2,file=/etc/c2VjcmV0.key"),
            option("spice", "port=5900,password=c2VjcmV0"),
            option("drive", "file.driver=iscsi,file.password=c2VjcmV0,if=none"),
            option("drive", "file=/x.qcow2,encrypt.key-secret=s0"),
            {"name": "nodefaults"},
        ]});
        let kept = redact_secrets(&description);
        let text = kept.to_string();
        assert_eq!(text.matches("c2VjcmV0").count(), 1, "{text}");
        assert_eq!(text.matches(REDACTED).count(), 4, "{text}");
        for at in [2, 5, 6] {
            assert_eq!(kept["options"][at], description["options"][at]);
        }
        assert_eq!(kept["options"][0]["value"], "qom-type=secret,id=s0,data=(not kept),format=base64");
        assert_eq!(kept["schema"], 1);
        assert_eq!(redact_secrets(&Json::Null), Json::Null);
    }
}
