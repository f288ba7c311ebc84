"""What form a caller of the OpenAI API wants an answer in. Compiles nothing."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from loray.deployments.grammars import GrammarSpec
from loray.deployments.native_request import Body, Text, json_text
from loray.deployments.openai_messages import JsonObject, Name

Expression = Annotated[Text, Field(min_length=1)]


class NamedSchema(Body):
    name: Name
    description: Text | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    """Any object, when not given."""
    strict: bool | None = None
    """Answers are valid against the schema in any case."""


class AnswerFormat(Body):
    type: Literal["text", "json_object", "json_schema", "regex", "ebnf"]
    """regex and ebnf are not OpenAI's."""
    json_schema: NamedSchema | None = Field(default=None, validate_default=True)
    regex: Expression | None = Field(default=None, validate_default=True)
    """The whole answer matches it."""
    grammar: Expression | None = Field(default=None, validate_default=True)
    """In EBNF, as xgrammar reads it; the rule `root` is the whole answer."""

    @field_validator("json_schema", "regex", "grammar")
    @classmethod
    def _each_type_has_its_own(cls, value: Any, info: ValidationInfo) -> Any:
        owner = "ebnf" if info.field_name == "grammar" else info.field_name
        if "type" in info.data and (value is not None) != (info.data["type"] == owner):
            raise ValueError(f"the type {owner} has one, and no other")
        return value

    @property
    def spec(self) -> GrammarSpec | None:
        """None: any text will do."""
        if self.type == "text":
            return None
        if self.json_schema and self.json_schema.schema_ is not None:
            return GrammarSpec("json_schema", json_text(self.json_schema.schema_))
        if self.type in ("json_schema", "json_object"):
            return GrammarSpec("json_object")
        return GrammarSpec("regex", self.regex or "") if self.type == "regex" else GrammarSpec("ebnf", self.grammar or "")
